"""Tests that note how long each kind of work takes: what is computed by the processor, the rest by the clock."""

CALLS = """
import json, os, time
import pytest, ray

@pytest.fixture(scope="session")
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()

def layer(x, depth):
    return x if depth == 0 else layer(x + 1, depth - 1)

@ray.remote(num_cpus=0)
class Actor:
    def call(self, x):
        return layer(x, 5)

    def compute(self, n):
        began = time.thread_time()
        work(n)
        return time.thread_time() - began

def token(i, state):
    total = 0
    for j in range(12):
        total += (i * j) % 7
        state = (state * 31 + total) % 1000003
    return state

def work(n):
    state = 1
    for i in range(n):
        state = token(i, state)
    return state

def note(name, seconds):
    with open(os.environ["TIMES"], "a") as stream:
        stream.write(json.dumps([name, seconds]) + "\\n")

def test_calls(cluster):
    actor = Actor.remote()
    ray.get([actor.call.remote(i) for i in range(100)])
    for _ in range(60):
        began = time.perf_counter()
        for i in range(20):
            ray.get(actor.call.remote(i))
        note("20 calls", time.perf_counter() - began)

def test_calls_in_flight(cluster):
    actor = Actor.remote()
    ray.get([actor.call.remote(i) for i in range(100)])
    for _ in range(30):
        began = time.perf_counter()
        ray.get([actor.call.remote(i) for i in range(100)])
        note("100 calls in flight", time.perf_counter() - began)

def test_compute_in_an_actor(cluster):
    actor = Actor.remote()
    ray.get(actor.call.remote(0))
    for _ in range(30):
        note("compute in an actor", ray.get(actor.compute.remote(20000)))

def test_compute_here():
    for _ in range(30):
        began = time.thread_time()
        work(20000)
        note("compute in the test", time.thread_time() - began)

def test_start(cluster):
    for _ in range(16):
        began = time.perf_counter()
        ray.get(Actor.remote().call.remote(0))
        note("start of an actor", time.perf_counter() - began)
"""

COMPUTE = """
import json, os, time

def token(i, state):
    return state + i

def small_functions(n):
    state = 0
    for i in range(n):
        state = token(i, state)
    return state

def generator(n):
    return sum(x * 2 for x in range(n))

def test_compute():
    for _ in range(30):
        for name, work in (("20,000 small functions", small_functions), ("generator of 20,000", generator)):
            began = time.thread_time()
            work(20000)
            seconds = time.thread_time() - began
            with open(os.environ["TIMES"], "a") as stream:
                stream.write(json.dumps([name, seconds]) + "\\n")
"""
