from pkg.script_body import compute

if __name__ == "__main__":
    print(compute())
