"""Print docs/reproduce.md; `make reproduce` calls this."""

from tools.reproduce.page import page

if __name__ == "__main__":
    print(page(), end="")
