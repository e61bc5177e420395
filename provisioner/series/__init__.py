"""Everything that names patches: the store, recipes, files and folders, forks."""
