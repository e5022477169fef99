"""ms-swift as an adapter: its GRPO trainer on the CPU, with the engine that samples replaced. Written for 4.5 and 4.6."""

from __future__ import annotations

from ms_swift_sampling import SwiftSampling


class MsSwiftAdapter(SwiftSampling):
    """Adapter of ms-swift under some settings, by default those of `swift rlhf --rlhf_type grpo`."""
