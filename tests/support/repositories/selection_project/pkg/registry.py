NAMES = []


def register(name):
    NAMES.append(name)


register("plugin")
