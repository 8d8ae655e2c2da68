"""`python -m grailnode`: the console script without its installation."""

from grailnode.cli.main import main

if __name__ == "__main__":
    main()
