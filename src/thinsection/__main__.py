"""`python -m thinsection` is the `thinsection` command."""

from thinsection.cli.main import main

if __name__ == "__main__":
    main()
