// The types of the official client are assignable to an exchange, for both generators. This file is only checked, not run.

import type {
  ChatCompletionAssistantMessageParam,
  ChatCompletionFunctionMessageParam,
  ChatCompletionMessage,
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
