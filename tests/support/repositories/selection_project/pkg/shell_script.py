def shelled():
    return 0


if __name__ == "__main__":
    shelled()
