def test_x():
    import numpy
    globals()["np"]=numpy
    exec(open("/tmp/mm.py").read(), globals())
