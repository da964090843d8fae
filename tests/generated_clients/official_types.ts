// The types of the official clients are assignable to requests, and contexts to the types of the official clients, for both
// generators. This file is only checked, not run.

import type {
  AssistantMessageParam,
  Message,
  MessageCreateParamsNonStreaming,
  MessageParam,
  Tool,
  UserMessageParam,
} from "@anthropic-ai/sdk/resources/messages";
import type {
  ChatCompletionAssistantMessageParam,
  ChatCompletionCreateParamsNonStreaming,
  ChatCompletionFunctionMessageParam,
  ChatCompletionMessage,
  ChatCompletionMessageParam,
  ChatCompletionTool,
  ChatCompletionToolMessageParam,
  ChatCompletionUserMessageParam,
} from "openai/resources/chat/completions";
import type * as heyApi from "./generated/hey-api";
import type { components } from "./generated/openapi-typescript";

type HistoryMessage =
  | ChatCompletionUserMessageParam
  | ChatCompletionAssistantMessageParam
  | ChatCompletionToolMessageParam
  | ChatCompletionFunctionMessageParam;

export function exchange(
  messages: HistoryMessage[],
  reply: ChatCompletionMessage,
): components["schemas"]["ExchangeRequest"] & heyApi.ExchangeRequest {
  return { messages: [...messages, reply] };
}

export function texts(
  question: ChatCompletionUserMessageParam["content"],
): components["schemas"]["QuestionAndAnswer"] & heyApi.QuestionAndAnswer {
  return { user_message: question, assistant_reply: "Yes." };
}

export function contextRequest(
  question: ChatCompletionUserMessageParam["content"],
): components["schemas"]["ContextRequest"] & heyApi.ContextRequest {
  return { user_message: question };
}

export function list(
  messages: ChatCompletionMessageParam[],
): components["schemas"]["SyncRequest"] & heyApi.SyncRequest {
  return { messages };
}

export function anthropicExchange(
  messages: (UserMessageParam | AssistantMessageParam)[],
  { role, content }: Message,
): components["schemas"]["ExchangeRequest"] & heyApi.ExchangeRequest {
  return { format: "anthropic", messages: [...messages, { role, content }] };
}

export function anthropicList(messages: MessageParam[]): components["schemas"]["SyncRequest"] & heyApi.SyncRequest {
  return { format: "anthropic", messages };
}

export function anthropicContextRequest(
  question: UserMessageParam["content"],
): components["schemas"]["ContextRequest"] & heyApi.ContextRequest {
  return { format: "anthropic", user_message: question };
}

type Schemas = components["schemas"];

export function call(
  context: Schemas["OpenAiContext"] | heyApi.OpenAiContext,
  { tools }: Schemas["OpenAiToolList"] | heyApi.OpenAiToolList,
): ChatCompletionCreateParamsNonStreaming {
  const definitions: ChatCompletionTool[] = tools;
  return { model: "a", messages: context.messages, tools: definitions };
}

export function anthropicCall(
  { system, messages }: Schemas["AnthropicContext"] | heyApi.AnthropicContext,
  { tools }: Schemas["AnthropicToolList"] | heyApi.AnthropicToolList,
): MessageCreateParamsNonStreaming {
  const definitions: Tool[] = tools;
  return { model: "a", max_tokens: 1, system, messages, tools: definitions };
}

export function anyCall(
  context: Schemas["ContextResponse"] | heyApi.ContextResponse,
): ChatCompletionMessageParam[] | MessageParam[] {
  if (context.format === "anthropic") {
    return context.messages;
  }
  return context.fields === "standard" ? context.messages : [];
}
