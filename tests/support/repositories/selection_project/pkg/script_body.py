def compute():
    return 5


def unused():
    return 6
