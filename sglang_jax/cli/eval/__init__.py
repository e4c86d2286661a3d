"""The commands `eval`: data sets of questions, answered by generating, and scored as their published scripts do."""
