import asyncio
import os
import signal
import sys
import threading
import time

import ray

from pkg.constants import RATE
from pkg.scaling import other, scale


@ray.remote
class Counter:
    def __init__(self, start=0):
        self.n = start

    def a(self):
        self.n += 1
        return scale(self.n)

    def b(self):
        return other(self.n)

    def late(self):
        time.sleep(0.5)
        return late_work()

    def quick(self):
        return 1

    def die(self):
        doomed()
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, begun):
        hanging()
        begun.touch()
        time.sleep(9999)


def late_work():
    return 1


def doomed():
    return 1


def hanging():
    return 1


@ray.remote
def task(x):
    return task_body(x)


def task_body(x):
    return x + RATE


@ray.remote
class Async:
    async def m(self):
        await asyncio.sleep(0.01)
        return await self.inner()

    async def inner(self):
        return async_body()

    async def n(self):
        return 3


def async_body():
    return 1


@ray.remote(max_concurrency=4)
class Threaded:
    def work(self, x):
        time.sleep(0.1)
        return threaded_body(x)

    def background(self):
        done = []
        thread = threading.Thread(target=lambda: done.append(background_body()))
        thread.start()
        thread.join()
        return done


def threaded_body(x):
    return x


def background_body():
    return 1


@ray.remote
class Outer:
    def __init__(self):
        self.inner = Counter.remote(5)

    def call(self):
        return ray.get(self.inner.b.remote())


@ray.remote
class Streamer:
    def stream(self, n):
        for i in range(n):
            yield stream_body(i)


def stream_body(i):
    return i


@ray.remote
def stream_task(n):
    for i in range(n):
        yield stream_body(i)


@ray.remote
class Lazy:
    def __init__(self):
        self.model = None

    def predict(self, x):
        if self.model is None:
            self.model = make_model()
        return self.model + x

    def fail(self):
        raise ValueError("wrong")


def make_model():
    return model_size()


def model_size():
    return 1


@ray.remote
class Spawner:
    def shell(self):
        return os.system(f"{sys.executable} -m pkg.shell_script")

    def run(self):
        import subprocess
        import sys

        return subprocess.run([sys.executable, "-m", "pkg.script"], capture_output=True, check=True).stdout
