"""Small files of clients, beside the runs: tensors and profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.activations.accounts import OPERATOR, Account
from deployments.points.profiles import Profile

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

    async def tensor_files(
        self, limit: int = 100, after: str | None = None, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """Up to `limit` tensor files that the account may read, as `TensorFiles.list`."""
        return self._tensors.list(limit, after, account)

    async def put_tensors(
        self, data: bytes, most: int, account: Account = OPERATOR, most_of_one: int | None = None
    ) -> dict[str, Any]:
        """Keep a client's safetensors file; durable when it answers.

        Args:
            data: The file.
            most: The most bytes of all files together.
            account: Who sends it.
            most_of_one: The most bytes of all their files together, unless they are an admin.

        Returns:
            What `tensor_files` says of it.

        Raises:
            RequestError: The file is not one that may be kept, or there is no room for it.
            StoreError: The disk refuses.
        """
        return await self._changed(self._tensors.put, data, most, account, most_of_one)  # type: ignore[no-any-return]

    async def tensor_file(
        self, tensor_id: str, account: Account = OPERATOR, first: int = 0, end: int | None = None
    ) -> bytes | None:
        """A tensor file as it was sent, or its bytes from `first` to `end`; None if the account may read none.

        `tensors.pick` finds a tensor in a whole one.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.to_thread(self._tensors.read, tensor_id, account, first, end)

    async def tensor_file_bytes(self, tensor_id: str, account: Account = OPERATOR) -> int | None:
        """How many bytes a tensor file has; None if the account may read none."""
        return self._tensors.size(tensor_id, account)

    async def delete_tensors(self, tensor_id: str, account: Account = OPERATOR) -> bool:
        """Delete a tensor file: true when it is gone, false if there was none that the account may change.

        Raises:
            StoreError: The disk refuses.
        """
        return await self._changed(self._tensors.delete, tensor_id, account)  # type: ignore[no-any-return]

    async def profiles(
        self, limit: int = 100, after: str | None = None, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """Up to `limit` profiles that the account may read, as `ProfileFiles.list`."""
        return self._profiles.list(limit, after, account)

    async def put_profile(self, profile: Profile, account: Account, most: int) -> dict[str, Any]:
        """Keep a profile, in the place of one of its name; durable when it answers.

        Args:
            profile: The profile.
            account: Whose it is.
            most: The most profiles of an owner who is no admin.

        Returns:
            What `profile` says of it.

        Raises:
            RequestError: It is too large, there are too many, or defaults may not change.
            StoreError: The disk refuses.
        """
        return await self._changed(self._profiles.put, profile, account, most)  # type: ignore[no-any-return]

    async def profile(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> dict[str, Any] | None:
        """A profile as `ProfileFiles.get` gives it; None if the account may read none of the name.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.to_thread(self._profiles.get, name, account, owner)

    async def default_profiles(self, known: int | None = None) -> tuple[int, dict[str, dict[str, Any]]] | None:
        """The models' default profiles, and a version of all profiles; None where `known` is that version.

        Raises:
            StoreError: The disk refuses.
        """
        return await asyncio.to_thread(self._profiles.defaults, known)

    async def delete_profile(self, name: str, account: Account = OPERATOR, owner: str | None = None) -> bool:
        """Delete a profile: true when it is gone, false if there was none that the account may change.

        Raises:
            RequestError: It is a default, and the account is no admin's.
            StoreError: The disk refuses.
        """
        return await self._changed(self._profiles.delete, name, account, owner)  # type: ignore[no-any-return]

    async def _changed(self, change: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._files_pool, change, *args)
