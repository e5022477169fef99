from pkg.script_helper import compute

if __name__ == "__main__":
    print(compute())
