"""Profiles of steps, by torch's own profiler."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Profile:
    """A recording that runs: what the stream's thread does, and its GPU."""

    folder: Path
    device: torch.device
    recording: profile

    @classmethod
    def start(cls, folder: Path, device: torch.device) -> Profile:
        """To be called on the thread that is to be recorded, as `stop` is."""
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        return cls(folder, device, recording)

    def stop(self) -> Path:
        """Writes a trace that Perfetto and chrome://tracing read, and returns its file. Its name tells processes apart:
        those of several ranks write to one folder."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.recording.stop()
        stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
        file = self.folder / f"{stamp}-{socket.gethostname()}-{os.getpid()}.trace.json.gz"
        self.recording.export_chrome_trace(str(file))
        return file
