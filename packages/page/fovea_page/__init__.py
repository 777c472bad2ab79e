"""The model fovea-page and the pages on which it is measured. Data only; `fovea.core.bundled` finds it."""
