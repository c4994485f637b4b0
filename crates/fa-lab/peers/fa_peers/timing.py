"""Times of calls on the GPU, alone or as a CUDA graph."""

import statistics
import time

# Calls that do not count at the head of every queue.
LEAD_CALLS = 3
WARM_UP_CALLS = 3
WARM_UP_SECONDS = 0.02
# Calls queued behind one spin kernel; the driver's queue holds about a thousand launches.
QUEUE_CALLS = 32
SPIN_SECONDS_LIMIT = 0.25


class Clock:
    """Times calls on the current stream with CUDA events."""

    def __init__(self, torch):
        self.torch = torch
        self.cycles_per_second = None

    def spin(self, seconds):
        """Keep the GPU busy for about `seconds`, so that calls queue up behind it."""
        sleep = getattr(self.torch.cuda, "_sleep", None)
        if sleep is None:
            return
        if self.cycles_per_second is None:
            cycles = 20_000_000
            sleep(cycles)
            start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            sleep(cycles)
            end.record()
            self.torch.cuda.synchronize()
            self.cycles_per_second = cycles / max(start.elapsed_time(end) / 1e3, 1e-6)
        sleep(int(min(seconds, SPIN_SECONDS_LIMIT) * self.cycles_per_second))

    def warm_up(self, call):
        """Run the call until clocks and caches have settled; return the host's seconds to queue one call."""
        call()
        self.torch.cuda.synchronize()
        begin = time.perf_counter()
        queued = []
        while len(queued) < WARM_UP_CALLS or time.perf_counter() - begin < WARM_UP_SECONDS:
            start = time.perf_counter()
            call()
            queued.append(time.perf_counter() - start)
            self.torch.cuda.synchronize()
        return statistics.median(queued)

    def time(self, call, calls, host_seconds):
        """Milliseconds of each of `calls` calls."""
        times = []
        while len(times) < calls:
            count = min(QUEUE_CALLS, calls - len(times))
            events = [[self.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            self.spin(1.5 * (count + LEAD_CALLS) * host_seconds + 1e-3)
            for _ in range(LEAD_CALLS):
                call()
            for start, end in events:
                start.record()
                call()
                end.record()
            self.torch.cuda.synchronize()
            times += [start.elapsed_time(end) for start, end in events]
        return times


class Replay:
    """So many calls captured as one CUDA graph."""

    def __init__(self, torch, call, calls):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.calls = calls
        # The graph holds addresses; the tensors there live as long as the call that has them.
        self.call = call
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            # Results live in the graph's memory.
            self.results = [call() for _ in range(calls)]

    def __call__(self):
        self.graph.replay()
        return self.results[-1]
