"""The API keys of the application `keyed`, which tests of keys and of owners share."""

from __future__ import annotations

USE, ADMIN, FROM_ENVIRONMENT = "sk-use-4fJc0Vb1xT9q", "sk-admin-Zr83hKpW0s", "sk-env-Lm2eYd6NuA7c"
CODE = "sk-code-9QwTz51nXb"
IN_FILE = f"# the evaluation's\nuse:{USE}\n\ncode:{CODE} admin:{ADMIN}\n"
ROLES = {"alice": "code", "bob": "code", "hog": "use", "meter": "use", "gone": "use", "root": "admin"}
OWNERS = {name: f"sk-{name}-0123456789abcdef" for name in ROLES}
IN_ENVIRONMENT = " ".join([f"use:{FROM_ENVIRONMENT}", *(f"{ROLES[name]}@{name}:{key}" for name, key in OWNERS.items())])
ORIGIN = "https://app.example"
