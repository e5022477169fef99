LIMIT = 3


def scale(x):
    return x * 2


def other(x):
    return x + 1
