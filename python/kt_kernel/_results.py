"""Where results are written: buffers that live on, so that a captured graph finds them and a call allocates nothing."""
import threading

# CPU results up to this size belong to one wrapper and thread. Larger ones, of prompts, are shared by the layers of a
# thread, even and odd ones apart: a model of 60 layers would hold gigabytes otherwise. On a GPU, larger ones that no
# graph captures are new tensors of the stream: engines with a stream for each layer would hold one for each otherwise.
OWN_BYTES = 1 << 20


class ResultBuffer:
    """A tensor [capacity, hidden] and views of its first rows. Grows; views that are out keep the old memory. Callers
    of the package get other tensors of the same memory: they may do to those whatever torch can."""

    def __init__(self, torch, hidden, dtype, device):
        self._torch, self._hidden, self._dtype, self._device = torch, hidden, dtype, device
        self._tensor = None
        self._views = {}

    def rows(self, tokens):
        view = self._views.get(tokens)
        return view if view is not None else self._new_view(tokens)

    def _new_view(self, tokens):
        if self._tensor is None or tokens > self._tensor.shape[0]:
            self._views.clear()
            capacity = 1 << max(tokens - 1, 0).bit_length()
            with self._torch.inference_mode(False):  # it outlives such a mode
                self._tensor = self._torch.zeros((capacity, self._hidden), dtype=self._dtype, device=self._device)
        elif len(self._views) >= 4096:
            self._views.clear()
        with self._torch.inference_mode(False):
            view = self._tensor[:tokens]
        self._views[tokens] = view
        return view


class ThreadBuffers(threading.local):
    """Buffers by key, one set for each thread."""

    def __init__(self):
        self.buffers = {}
        self.pending = None


class StreamBuffers:
    """Results on GPUs, shared by the layers that use one stream, even and odd ones apart."""

    def __init__(self):
        self._lock = threading.Lock()
        self._buffers = {}

    def of(self, torch, stream, hidden, dtype, device, odd):
        key = (stream, hidden, dtype, device, odd)
        found = self._buffers.get(key)
        if found is None:
            with self._lock:
                found = self._buffers.setdefault(key, ResultBuffer(torch, hidden, dtype, device))
        return found

    def clear(self):
        with self._lock:
            self._buffers.clear()
