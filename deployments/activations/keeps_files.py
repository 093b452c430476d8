"""Small files of clients, beside the runs: tensors and profiles."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.activations.profiles import Profile

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.profile_files import ProfileFiles
    from deployments.activations.tensor_files import TensorFiles


class KeepsFiles:
    """What the store does besides runs."""

    _tensors: TensorFiles
    _profiles: ProfileFiles
    _files_pool: ThreadPoolExecutor

    def _keep_files(self, root: Path) -> None:
        from deployments.activations.profile_files import ProfileFiles
        from deployments.activations.tensor_files import TensorFiles

        self._tensors = TensorFiles(root)
        self._profiles = ProfileFiles(root)
        self._files_pool = ThreadPoolExecutor(1, thread_name_prefix="small-files")  # one changes them at a time

    async def tensor_files(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Up to `limit` tensor files in the order of their ids, beginning behind the id `after`."""
        return self._tensors.list(limit, after)

    async def put_tensors(self, data: bytes, most: int) -> dict[str, Any]:
        """Keep a client's safetensors file; durable when it answers.

        Args:
            data: The file.
            most: The most bytes of all files together.

        Returns:
            What `tensor_files` says of it.

        Raises:
            RequestError: The file is not one that may be kept, or there is no room for it.
            StoreError: The disk refuses.
        """
        return await asyncio.get_running_loop().run_in_executor(self._files_pool, self._tensors.put, data, most)

    async def tensor_file(self, tensor_id: str, first: int = 0, end: int | None = None) -> bytes | None:
        """A tensor file as it was sent, or its bytes from `first` to `end`; None if there is none.

        `tensors.pick` finds a tensor in a whole one.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.to_thread(self._tensors.read, tensor_id, first, end)

    async def tensor_file_bytes(self, tensor_id: str) -> int | None:
        """How many bytes a tensor file has; None if there is none."""
        return self._tensors.size(tensor_id)

    async def delete_tensors(self, tensor_id: str) -> bool:
        """Delete a tensor file: true when it is gone, false if there was none.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.get_running_loop().run_in_executor(self._files_pool, self._tensors.delete, tensor_id)

    async def profiles(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Up to `limit` profiles in the order of their names, beginning behind `after`; without what they do."""
        return self._profiles.list(limit, after)

    async def put_profile(self, profile: Profile, by_admin: bool) -> dict[str, Any]:
        """Keep a profile, in the place of one of its name; durable when it answers.

        Args:
            profile: The profile.
            by_admin: Whether defaults may change.

        Returns:
            What `profile` says of it.

        Raises:
            RequestError: It is too large, there are too many, or defaults may not change.
            StoreError: The disk refuses.
        """
        return await asyncio.get_running_loop().run_in_executor(self._files_pool, self._profiles.put, profile, by_admin)

    async def profile(self, name: str) -> dict[str, Any] | None:
        """A profile as it was sent, with when, and whether it is a default; None if there is none.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.to_thread(self._profiles.get, name)

    async def default_profiles(self, known: int | None = None) -> tuple[int, dict[str, dict[str, Any]]] | None:
        """The models' default profiles, and a version of all profiles; None where `known` is that version.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.to_thread(self._profiles.defaults, known)

    async def delete_profile(self, name: str) -> bool:
        """Delete a profile: true when it is gone, false if there was none.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.get_running_loop().run_in_executor(self._files_pool, self._profiles.delete, name)
