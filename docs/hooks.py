"""The menu and the table of methods of the documentation, built when mkdocs runs."""

from typing import Any

GUIDES = ["index", "getting-started", "own-data", "callbacks", "multi-gpu", "extending"]
TABLE = "<!-- table of methods -->"


def on_files(files: Any, config: Any) -> Any:
    """List the guides in reading order and every further page as a method's."""
    pages = {file.src_uri for file in files.documentation_pages()}
    guides = [f"{name}.md" for name in GUIDES]
    methods = sorted(page for page in pages - set(guides) if "/" not in page)
    config.nav = [*guides, *([{"Methods": methods}] if methods else [])]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the cards of the methods where the mark stands."""
    if TABLE not in markdown:
        return markdown
    from lightning_modules.papers import cards, markdown_table

    return markdown.replace(TABLE, markdown_table(cards()).replace("](docs/", "]("))
