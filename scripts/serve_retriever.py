"""Serve a local retriever over HTTP; `--help` explains."""

from trl_stppo.recipes.search.server import main

if __name__ == "__main__":
    main()
