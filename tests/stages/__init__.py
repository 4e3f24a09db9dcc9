"""Tests of stages: those of stages/KIND/NAME.py of the package are in KIND/test_NAME.py here.

The folders are packages, because several modules have the same name, such as none.py.
"""
