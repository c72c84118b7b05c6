"""`python -m weightvc_cli` is the command `weightvc`."""

from weightvc_cli.main import main

if __name__ == "__main__":
    main()
