"""What clients keep in a store beside runs: tensors and profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.activations.accounts import OPERATOR, Account
from deployments.points.profiles import Profile

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.state.profiles import StoredProfiles
    from deployments.activations.tensors.files import TensorFiles


class KeepsFiles:
    """What the store does besides runs. All methods raise StoreError where the disk refuses."""

    _tensors: TensorFiles
    _profiles: StoredProfiles
    _files_pool: ThreadPoolExecutor

    def _keep_files(self, root: Path) -> None:
        from deployments.activations.state.profiles import StoredProfiles
        from deployments.activations.tensors.files import TensorFiles

        self._tensors = TensorFiles(root)
        self._profiles = StoredProfiles(root)
        self._files_pool = ThreadPoolExecutor(1, thread_name_prefix="small-files")  # one changes them at a time

    async def tensor_files(
        self, limit: int = 100, after: str | None = None, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """As `TensorFiles.list`."""
        return self._tensors.list(limit, after, account)

    async def put_tensors(
        self, data: bytes, most: int, account: Account = OPERATOR, most_of_one: int | None = None
    ) -> dict[str, Any]:
        """As `TensorFiles.put`."""
        return await self._changed(self._tensors.put, data, most, account, most_of_one)  # type: ignore[no-any-return]

    async def tensor_file(
        self, tensor_id: str, account: Account = OPERATOR, first: int = 0, end: int | None = None
    ) -> bytes | None:
        """As `TensorFiles.read`; `tensors.pick` finds a tensor in a whole file."""
        return await asyncio.to_thread(self._tensors.read, tensor_id, account, first, end)

    async def tensor_file_bytes(self, tensor_id: str, account: Account = OPERATOR) -> int | None:
        """As `TensorFiles.size`."""
        return self._tensors.size(tensor_id, account)

    async def delete_tensors(self, tensor_id: str, account: Account = OPERATOR) -> bool:
        """As `TensorFiles.delete`."""
        return await self._changed(self._tensors.delete, tensor_id, account)  # type: ignore[no-any-return]

    async def profiles(
        self, limit: int = 100, after: str | None = None, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """As `StoredProfiles.list`."""
        return await asyncio.to_thread(self._profiles.list, limit, after, account)

    async def put_profile(self, profile: Profile, account: Account, most: int) -> dict[str, Any]:
        """As `StoredProfiles.put`."""
        return await self._changed(self._profiles.put, profile, account, most)  # type: ignore[no-any-return]

    async def profile(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> dict[str, Any] | None:
        """As `StoredProfiles.get`."""
        return await asyncio.to_thread(self._profiles.get, name, account, owner)

    async def default_profiles(self, known: int | None = None) -> tuple[int, dict[str, dict[str, Any]]] | None:
        """As `StoredProfiles.defaults`."""
        return await asyncio.to_thread(self._profiles.defaults, known)

    async def delete_profile(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> bool:
        """As `StoredProfiles.delete`."""
        return await self._changed(self._profiles.delete, name, account, owner)  # type: ignore[no-any-return]

    async def _changed(self, change: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._files_pool, change, *args)
