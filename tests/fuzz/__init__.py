"""Decoders meet arbitrary bytes: by hypothesis in every test run, by atheris for as long as you like (run.py)."""
