"""Who runs next, and what became of it. Plain Python and numpy; devices are the runner's business."""
