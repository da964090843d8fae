"""Uses all that precis offers over MCP with the newest official client, by a handshake and without one, as both modes of the
client do. Arguments: the address of /mcp, the session, the API key if there is one."""

import asyncio
import sys

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

url, session, *key = sys.argv[1:]
headers = {"x-precis-session": session} | {"authorization": f"Bearer {key}" for key in key}


async def main(mode):
    async with httpx2.AsyncClient(headers=headers, trust_env=False, timeout=60) as http:
        async with Client(streamable_http_client(url, http_client=http), mode=mode) as client:
            assert client.server_info.name == "precis", client.server_info
            assert client.instructions.startswith("## Memory Guide"), client.instructions
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert list(tools) == ["memory_read", "memory_write", "memory_append", "memory_replace", "search_history"], tools
            assert tools["memory_write"].input_schema["required"] == ["content"], tools

            async def call(name, **arguments):
                result = await client.call_tool(name, arguments)
                (block,) = result.content
                return result.is_error, block.text, result.structured_content

            failed, text, data = await call("memory_write", content=f"Likes tea ({mode}).")
            assert not failed and data["words"] == 3, (text, data)
            failed, text, data = await call("memory_read")
            assert not failed and text == data["content"] == f"Likes tea ({mode}).", (text, data)
            failed, text, data = await call("search_history", query="rhubarb", max_results=5)
            assert not failed and "rhubarb" in text, (text, data)
            failed, text, data = await call("memory_write", text="x")
            assert failed and "`content` is missing" in text, (text, data)
            resources = [str(resource.uri) for resource in (await client.list_resources()).resources]
            assert resources == ["precis://memory", "precis://summary"], resources
            (memory,) = (await client.read_resource("precis://memory")).contents
            assert (memory.text, memory.mime_type) == (f"Likes tea ({mode}).", "text/markdown"), memory
            prompts = [prompt.name for prompt in (await client.list_prompts()).prompts]
            assert prompts == ["memory_guide"], prompts
            (message,) = (await client.get_prompt("memory_guide")).messages
            assert message.content.text == client.instructions, message
            print(mode, client.protocol_version)


for mode in ["legacy", "auto"]:
    asyncio.run(main(mode))
