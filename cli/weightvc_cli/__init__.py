"""The command line of weightvc: thin, each command a few calls of the library. docs/cli.md describes it."""
