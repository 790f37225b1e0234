"""A component is a plain class without references to the runtime or to other components.

A component is constructed on each of its ranks as `cls(context, **kwargs)`. Its public methods are called by name
through a worker group; calls of one rank run one at a time, in order, in a thread of its own. Data streams in and out
through channels that are passed as arguments. A method named `close`, if there is one, is called once at shutdown.
There is no base class to inherit from: a component receives a `ComponentContext`. The runtime transports calls and
data.
"""

from __future__ import annotations

from rl_platform.runtime.host import ComponentContext

__all__ = ["ComponentContext"]
