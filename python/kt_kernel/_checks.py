"""Arguments of a wrapper, looked at: each comes back as the extension takes it, or an error names it."""
import math


def whole(name, value, least, most=2**31 - 1):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    value = value.__index__()
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")
    if value > most:
        raise ValueError(f"{name} is {value}; expected {most} or less")
    return value


def swiglu(name, value):
    """A finite number, 0: without."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {number}; expected 0 or a finite number above")
    return number


def text(name, value):
    """What the extension takes for a string: UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {value!r}; expected text that is UTF-8") from None
    return value


def nodes(given):
    try:
        return [whole("numa_nodes", node, 0) for node in (() if given is None else given)]
    except TypeError as error:
        if hasattr(type(given), "__iter__"):
            raise
        raise TypeError(f"numa_nodes: expected a list of ints, got {type(given).__name__}") from error


def one_of(mapping, mapping_cpu):
    if mapping is not None and mapping_cpu is not None:
        raise TypeError("physical_to_logical_map and physical_to_logical_map_cpu are two names of one "
                        "argument; got both")
    return mapping if mapping_cpu is None else mapping_cpu


def shown(tensor):
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
