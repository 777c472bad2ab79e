"""One module or folder per target: `render` and `checks`, see `fovea.deploy.target`."""
