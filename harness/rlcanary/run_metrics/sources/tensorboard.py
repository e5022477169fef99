"""Metrics of a training run, from TensorBoard event files."""

from collections.abc import Iterator
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.run_metrics.source import MetricSource, Scalar


class TensorBoard(MetricSource):
    """The scalars of event files, of TensorFlow 1 and 2."""

    description = "TensorBoard event files (events*tfevents*)"
    pattern = "events*tfevents*"
    has_steps = True

    def read(self, path: Path) -> Iterator[Scalar | str]:
        """Read an event file. A damaged end is explained.

        Raises:
            UserError: The tensorboard package is missing.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.tensorflow_stub import errors
            from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
            from tensorboard.util.tensor_util import make_ndarray
        except ImportError as error:
            raise UserError(
                f"reading {path.name} needs the tensorboard package ({error}); pip install tensorboard"
            ) from error

        reader = PyRecordReader_New(str(path))
        plugins: dict[str, str] = {}
        while True:
            try:
                reader.GetNext()
            except errors.OutOfRangeError:
                return
            except errors.DataLossError as error:
                yield f"damaged or cut off; only its intact part is read ({error.message})"
                return
            event = Event.FromString(reader.record())
            for value in event.summary.value:
                # Only the first value of a tag says which plugin it is for.
                plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
                if value.HasField("simple_value"):
                    yield Scalar(value.tag, event.step, value.simple_value)
                elif value.HasField("tensor") and plugin == "scalars":
                    yield Scalar(value.tag, event.step, make_ndarray(value.tensor).item())


SOURCE = TensorBoard()
