// OpenAI's client for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";

const url = process.env.C2CSERVE_URL;
const model = "adder-qwen";
const messages = [{ role: "user", content: "347+86=" }];
const answer = "433";
const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.C2CSERVE_KEY ?? "none", maxRetries: 0 });
const city = { enum: ["Paris", "Rome"] };
const schema = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
const tool = { type: "function", function: { name: "weather", parameters: schema } };
const asked = [{ role: "user", content: "How is the weather?" }];

const checks = {
  async models() {
    const found = [];
    for await (const one of api.models.list()) found.push(one.id);
    assert(found.includes(model));
  },
  async chat() {
    const said = await api.chat.completions.create({ model, messages, temperature: 0 });
    assert.equal(said.choices[0].message.content, answer);
  },
  async stream() {
    const stream = api.chat.completions.stream({
      model, messages, temperature: 0, stream_options: { include_usage: true },
    });
    assert.equal(await stream.finalContent(), answer);
    assert((await stream.totalUsage()).prompt_tokens > 0);
  },
  async text() {
    const said = await api.completions.create({
      model: "sorter-llama", prompt: "sort: dcba =>", temperature: 0, max_tokens: 8,
    });
    assert.equal(said.choices[0].text.trim(), "abcd");
  },
  async tools() {
    const common = { model: "caller", tools: [tool], tool_choice: "required", max_tokens: 300, seed: 1 };
    const body = { ...common, messages: asked, parallel_tool_calls: false };
    const { message } = (await api.chat.completions.create(body)).choices[0];
    assert(city.enum.includes(JSON.parse(message.tool_calls[0].function.arguments).city));
    const streamed = await api.chat.completions.stream(body).finalMessage();
    assert.equal(streamed.tool_calls[0].function.arguments, message.tool_calls[0].function.arguments);
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    await api.chat.completions.create({ ...body, tool_choice: "auto", messages: [...asked, message, result] });
  },
  async structured() {
    const said = await api.chat.completions.parse({
      model: "chat", messages: asked, max_tokens: 400,
      response_format: { type: "json_schema", json_schema: { name: "w", strict: true, schema } },
    });
    assert(city.enum.includes(said.choices[0].message.parsed.city));
  },
  async responses() {
    const said = await api.responses.create({ model, input: "347+86=", temperature: 0 });
    assert.equal(said.output_text, answer);
    const stream = api.responses.stream({ model, input: "347+86=", temperature: 0 });
    assert.equal((await stream.finalResponse()).output_text, answer);
  },
  async errors() {
    await assert.rejects(
      api.chat.completions.create({ model: "adder-qwem", messages }),
      (error) => error instanceof OpenAI.NotFoundError && error.message.includes(model),
    );
  },
};

for (const [feature, check] of Object.entries(checks)) {
  let error = "";
  try {
    await check();
  } catch (raised) {
    error = String(raised).replace(/\s+/g, " ").slice(0, 300) || "failed";
  }
  console.log(JSON.stringify({ feature, error }));
}
