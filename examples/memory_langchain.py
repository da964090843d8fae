"""precis as the chat history of LangChain. A turn of an agent made by langchain.agents.create_agent:

    history = PrecisChatMessageHistory("demo")
    messages = [*history.messages, HumanMessage("Where is the key?")]
    history.add_messages(agent.invoke({"messages": messages})["messages"][len(messages) - 1 :])
"""

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import convert_to_messages, convert_to_openai_messages, message_to_dict, messages_from_dict

from precis_client import Session


def from_chat(message):
    return message_to_dict(convert_to_messages([message])[0])


class PrecisChatMessageHistory(BaseChatMessageHistory):
    def __init__(self, session_id):
        self.session = Session(session_id)

    @property
    def messages(self):
        return messages_from_dict(self.session.load(from_chat))

    def add_messages(self, messages):
        self.session.append((message_to_dict(message), [convert_to_openai_messages(message)]) for message in messages)

    def clear(self):
        self.session.call("DELETE")
