"""`python -m s2moe.server …` is the same as `s2moe …`."""

from s2moe.server.cli import main

if __name__ == "__main__":
    main()
