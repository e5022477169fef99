import concurrent.futures
import multiprocessing
import threading


def child(queue):
    queue.put(child_body())


def child_body():
    return 5


def run(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    value = queue.get()
    process.join()
    return value


def pooled(x):
    return x * 2


def run_pool():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(pooled, [1, 2])


def executed(x):
    return x * 5


def run_executor():
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(executed, 2).result()


def threaded():
    return 7


def run_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(threaded()))
    thread.start()
    thread.join()
    return found
