"""Profiles of steps with torch's profiler."""

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
    """A running recording of the stream's thread and its GPU."""

    folder: Path
    device: torch.device
    recording: profile

    @classmethod
    def start(cls, folder: Path, device: torch.device) -> Profile:
        """Starts recording the calling thread, which must also call `stop`."""
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        return cls(folder, device, recording)

    def stop(self) -> Path:
        """Writes a trace for Perfetto and chrome://tracing, and returns its file. Its name has the process id: ranks
        share a folder."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.recording.stop()
        stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
        file = self.folder / f"{stamp}-{socket.gethostname()}-{os.getpid()}.trace.json.gz"
        self.recording.export_chrome_trace(str(file))
        return file
