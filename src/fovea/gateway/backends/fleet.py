"""All backends of a gateway, and which of them can serve a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fovea.core.errors import NotFound
from fovea.gateway.backends.backend import Backend
from fovea.gateway.config import BackendConfig, ModelConfig, api_key
from fovea.gateway.settings import ResilienceSettings


class Fleet:
    """The backends and models of a gateway. Used by the event loop's thread only.

    version: changes whenever a backend comes, goes, or serves other models.
    """

    def __init__(self, settings: ResilienceSettings) -> None:
        self.version = 0
        self._settings = settings
        self._backends: dict[str, Backend] = {}
        self._configured: dict[str, ModelConfig] = {}
        self._models: dict[str, ModelConfig] = {}

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def __len__(self) -> int:
        return len(self._backends)

    def get(self, name: str) -> Backend | None:
        """The backend of a name."""
        return self._backends.get(name)

    def configure(self, models: Sequence[ModelConfig]) -> None:
        """Use other models from now on."""
        self._configured = {name: model for model in models for name in (model.name, *model.aliases)}
        self.changed()

    def update(self, configs: Iterable[BackendConfig], now: float) -> tuple[list[str], list[str]]:
        """Use other backends from now on. Those that stay keep their state; those that go finish their work.

        Returns the names of the backends that came and that went. Raises ConfigError for a key file that
        cannot be read; nothing has changed then.
        """
        wanted, _first = {config.name: config for config in configs}, not self._backends
        keys = {name: api_key(config) for name, config in wanted.items()}
        gone = [name for name, old in self._backends.items() if wanted.get(name) != old.config]
        come = [name for name in wanted if name not in self._backends or name in gone]
        old = {name: self._backends.pop(name) for name in gone}
        for backend in old.values():
            backend.removed = True
        for name, stays in self._backends.items():
            stays.key = keys[name]  # its file may have changed
        warm = bool(self._backends)
        for name in come:
            self._backends[name] = backend = Backend(wanted[name], self._settings, now, keys[name])
            if name in old and not backend.models and old[name].config.url == backend.config.url:
                backend.models = old[name].models  # until it is asked again
            if warm:  # it joins others
                backend.come_back(now)
        if come or gone:
            self.changed()
        return come, [name for name in gone if name not in wanted]

    def learn_models(self, backend: Backend, models: Iterable[str]) -> None:
        """Note the models that a backend says it serves."""
        known = frozenset(models)
        if known != backend.models:
            backend.models = known
            self.changed()

    def changed(self) -> None:
        """Note that something about backends or models has changed."""
        self.version += 1
        self._models = dict(self._configured)
        for backend in self._backends.values():
            for name in backend.models:
                if name not in self._models and not self._is_served(name):
                    self._models[name] = ModelConfig(name)

    def _is_served(self, name: str) -> bool:
        """Whether a name is what backends call a configured model; clients then use the configured name."""
        return any(model.served == name for model in self._configured.values())

    def models(self) -> Iterator[ModelConfig]:
        """Yield every model once."""
        seen = set()
        for model in self._models.values():
            if model.name not in seen:
                seen.add(model.name)
                yield model

    def model(self, name: str) -> ModelConfig:
        """Return the model of a name or an alias. "" is the only one that there is.

        Raises NotFound if it is not served.
        """
        found = self._models.get(name)
        if found is None and not name:
            names = {model.name for model in self._models.values()}
            found = self._models[names.pop()] if len(names) == 1 else None
        if found is None:
            shown = ", ".join(sorted(self._models)[:20]) or "none yet"
            raise NotFound(
                f"model {name[:100]!r} is not served here; served: {shown}",
                param="model",
                code="model_not_found",
            )
        return found

    def serving(self, model: ModelConfig) -> list[Backend]:
        """Return the backends that can serve a model, whatever their state is."""
        served = model.served or model.name
        return [
            backend
            for backend in self._backends.values()
            if (not model.backends or backend.name in model.backends)
            and (served in backend.models or (not backend.models and bool(model.backends)))
        ]
