"""What Hydra could not compose, in one line: the override at fault and the nearest name.

Knows Hydra's errors; does not know the rules of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError

from asynctensorrlhf.composition.check import ESCAPE_ADVICE, unknown_key
from asynctensorrlhf.composition.errors import ConfigError, suggestion
from asynctensorrlhf.composition.hydra_app import COMPOSE_ERRORS, HydraApp


def find_fault(
    app: HydraApp, error: BaseException, overrides: Sequence[str], shared: Sequence[str] = ()
) -> tuple[ConfigError, tuple[str, ...]]:
    """The first override that does not compose with those before it, explained, and all that do compose.

    Group choices are tried first: they decide which keys there are. `error` is what composing all of them raised; it
    is explained by itself when each override alone is fine.
    """
    kept: list[str] = []
    faults: list[ConfigError] = []
    by_group_first = sorted(overrides, key=lambda text: not app.options(text.partition("=")[0].lstrip("+")))
    for override in ("", *by_group_first):
        candidate = [*kept, override] if override else kept
        try:
            app.compose([*shared, *candidate])
            kept = candidate
        except COMPOSE_ERRORS as fault:
            faults.append(_explain(app, fault, override, [*shared, *kept]))
    return (faults or [_explain(app, error, "", [*shared, *kept])])[0], tuple(kept)


def _explain(app: HydraApp, error: BaseException, override: str, kept: Sequence[str]) -> ConfigError:
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    if isinstance(error, MissingConfigException):
        return _unknown_option(app, error)
    if isinstance(error, OverrideParseException):
        return _unreadable(override, str(error))
    if "," in value and any(text in str(error) for text in ("Ambiguous value", "requires --multirun")):
        return ConfigError(f"{override}: several values; add -m to run one job each, or write {key}=[...] for a list")
    options = app.options(key)
    if options and value.startswith("["):
        return ConfigError(f"{override}: takes one option, of {', '.join(options)}")
    if options and isinstance(error, ValueError):
        return ConfigError(f"{override}: must be one of {', '.join(options)}")
    return _explain_cause(app, error, override, kept)


def _explain_cause(app: HydraApp, error: BaseException, override: str, kept: Sequence[str]) -> ConfigError:
    key, _, value = override.partition("=")
    chain = tuple(_causes(error))
    for cause in chain:
        full_key = str(getattr(cause, "full_key", None) or key.lstrip("+~"))
        if isinstance(cause, GrammarParseError):
            return ConfigError(f"{full_key}={value}: malformed interpolation; {ESCAPE_ADVICE}")
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
            schema = app.schema(kept, app.compose(kept))
            if schema.is_free(full_key):
                return ConfigError(f"{override}: a key that is new to a mapping is added with a plus: +{override}")
            return ConfigError(f"{full_key}={value}: {unknown_key(full_key, schema)}")
    lines = [line.strip() for cause in chain for line in str(cause).splitlines() if line.strip()]
    return ConfigError(f"{override or 'config'}: {lines[0] if lines else type(error).__name__}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _unknown_option(app: HydraApp, error: MissingConfigException) -> ConfigError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return ConfigError(f"--config-name {option}: no such file on the config search path")
    options = list(error.options or app.options(group))
    return ConfigError(
        f"{group}={option}: unknown option; must be one of {', '.join(options)}{suggestion(option, options)}"
    )


def _unreadable(override: str, reason: str) -> ConfigError:
    key, has_value, value = override.partition("=")
    if not has_value:
        return ConfigError(f"{override}: must be written group=option or key=value")
    quoted = f"'{key}=\"{value}\"'" if not set(value) & set("'\"\\") else f"{key}='\"...\"'"
    return ConfigError(f"{override}: cannot be read ({reason.splitlines()[0]}); quote the value twice: {quoted}")
