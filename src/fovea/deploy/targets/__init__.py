"""The targets: a module or a package for each, with `render` and `checks` (`fovea.deploy.target`)."""
