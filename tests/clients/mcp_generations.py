"""Uses all that precis offers over MCP with an official client of an earlier generation, and prints the version of the
protocol. Arguments: the address of /mcp, the session, the API key if there is one."""

import asyncio
import sys

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client
from pydantic import AnyUrl

url, session, *key = sys.argv[1:]
headers = {"x-precis-session": session} | {"authorization": f"Bearer {key}" for key in key}


async def main():
    async with streamablehttp_client(url, headers=headers) as (reading, writing, _), ClientSession(reading, writing) as client:
        welcome = await client.initialize()
        assert welcome.serverInfo.name == "precis", welcome
        assert welcome.instructions.startswith("## Memory Guide"), welcome

        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["memory_read", "memory_write", "memory_append", "memory_replace", "search_history"], tools
        assert tools["memory_write"].inputSchema["required"] == ["content"], tools

        async def call(name, **arguments):
            result = await client.call_tool(name, arguments)
            (block,) = result.content
            return result.isError, block.text

        document = f"Likes tea ({welcome.protocolVersion})."
        failed, text = await call("memory_write", content=document)
        assert not failed, text
        assert await call("memory_read") == (False, document)
        failed, text = await call("search_history", query="rhubarb", max_results=5)
        assert not failed and "rhubarb" in text, text
        failed, text = await call("memory_write", text="x")
        assert failed and "`content` is missing" in text, text

        resources = [str(resource.uri) for resource in (await client.list_resources()).resources]
        assert resources == ["precis://memory", "precis://summary"], resources
        (memory,) = (await client.read_resource(AnyUrl("precis://memory"))).contents
        assert (memory.text, memory.mimeType) == (document, "text/markdown"), memory

        prompts = [prompt.name for prompt in (await client.list_prompts()).prompts]
        assert prompts == ["memory_guide"], prompts
        (message,) = (await client.get_prompt("memory_guide")).messages
        assert message.content.text == welcome.instructions, message
        print(welcome.protocolVersion)


asyncio.run(main())
