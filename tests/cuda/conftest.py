"""Lets the tests here import what tests/ has."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
