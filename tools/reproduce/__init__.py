"""The page that says how every row of the papers' tables is made: command, expected figure, cost. All of it from data.

python -m tools.reproduce > docs/reproduce.md
"""
