"""Components: plain classes without references to the runtime or to other components.

A component is constructed on each of its ranks as `cls(context, **kwargs)` with a `ComponentContext`. A worker group
calls its public methods by name; calls of one rank run one at a time, in order, in a thread of its own. Data streams in
and out through channels that are passed as arguments. A method named `close` is called once at shutdown.
"""
