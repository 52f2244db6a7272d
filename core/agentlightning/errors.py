"""One error tree. Every message says what went wrong and what cures it.

Adding an error: subclass the nearest one here, give it a docstring that says when it is raised, and write the cure
into the message where it is raised. Errors hold only strings and numbers, so they pickle across processes.
"""


class AgentLightningError(Exception):
    """The root of everything that this package raises on purpose."""


class ConfigError(AgentLightningError):
    """A name, knob or combination that cannot work; raised before anything runs."""


class PromptError(AgentLightningError):
    """A prompt cannot be read or filled: a gap without a value, a value without a gap, braces that do not close."""


class ReplayError(AgentLightningError):
    """A recording of model calls is missing, broken or only replayed; or its server cannot start."""


class PluginError(AgentLightningError):
    """A plug-in is unknown, broken, or its extra is not installed."""


class StoreError(AgentLightningError):
    """The store cannot do what was asked: missing rows, wrong schema version, disk full, locked."""


class StoreUnavailable(StoreError):
    """The database or the store's server cannot work now: away, locked, full. The same call may succeed later."""


class Forbidden(StoreError):
    """The key that came with a call does not allow it."""


class NotFound(StoreError):
    """No record has that id."""


class Superseded(StoreError):
    """The attempt is over or a newer one has replaced it; its late result is kept but never used."""


class RunInUse(StoreError):
    """Another living process holds this run."""


class GatewayError(AgentLightningError):
    """The gateway cannot start, or a model call cannot be served."""


class GatewayGone(GatewayError):
    """The gateway that served an attempt ended with what it had not committed: the attempt must be made again."""


class PolicyError(AgentLightningError):
    """A policy back end failed to start, to learn, to save or to load."""


class RolloutError(AgentLightningError):
    """The user's program has a shape that cannot be run, or every rollout of a step failed."""


class RewardError(AgentLightningError):
    """A reward is not a finite number."""


class NothingToTrain(AgentLightningError):
    """The first rollouts gave no trainable transition; the message holds the ledger and the cure."""


class UnknownAgent(AgentLightningError):
    """A selected agent name matched no call; the message holds the names that were seen."""
