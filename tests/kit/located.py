"""An environment that says in which process it lives; light to import, which every such process does."""
