"""`python -m thinsection` is the `thinsection` command."""

from thinsection.cli.main import command

if __name__ == "__main__":
    command()
