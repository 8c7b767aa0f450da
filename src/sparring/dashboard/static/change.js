// Another form of the game: its declaration to edit, then what would change in words, then a new generation.

import { $, change, getJson, list, quoted, say, tell } from "./dom.js";

let path = ""; // of the game
let made = null; // what to do with the generation's name
let looked = null; // what was asked for when the changes were shown

// `newest`: the generation that is continued; `done(name)`: when there is a new one.
export async function openChange(newest, done) {
  [path, made] = [`v1/games/${encodeURIComponent(newest)}`, done];
  $("change-defaults").value = "";
  $("change-text").value = "";
  again();
  $("change").showModal();
  const declared = await getJson(path).catch((error) => error);
  if (declared instanceof Error) tell($("change-problem"), `The declaration is not known: ${declared.message}`);
  else $("change-text").value = JSON.stringify(declared, null, 1);
}

// What is edited is looked at again before anything is done.
function again() {
  looked = null;
  tell($("change-problem"), "");
  $("change-preview").hidden = true;
  say($("change-yes"), "Look what changes");
}

function asked() {
  const read = (id, what) => {
    try {
      return JSON.parse($(id).value.trim() || "{}");
    } catch (error) {
      throw new Error(`${what} is no JSON: ${error.message}`);
    }
  };
  return { game: read("change-text", "the declaration"), defaults: read("change-defaults", "what added fields are") };
}

async function act() {
  $("change-yes").disabled = true;
  tell($("change-problem"), "");
  try {
    if (looked === null) await look();
    else {
      const { name } = await change("POST", `${path}/generations`, { ...looked, confirmed: true });
      $("change").close();
      made(name);
    }
  } catch (error) {
    tell($("change-problem"), `Not done: ${error.message}`);
  }
  $("change-yes").disabled = false;
}

async function look() {
  const wanted = asked();
  const { name, generation, changes, exists } = await change("POST", `${path}/generations`, wanted);
  if (exists) throw new Error(`${name} has these spaces already`);
  looked = wanted;
  $("change-preview").hidden = false;
  say($("change-name"), `Generation ${generation}, ${name}:`);
  list($("change-words"), changes, (text, line = document.createElement("li")) => quoted(line, text));
  say($("change-yes"), `Make generation ${generation}`);
}

for (const id of ["change-text", "change-defaults"]) $(id).addEventListener("input", again);
$("change-no").addEventListener("click", () => $("change").close());
$("change-yes").addEventListener("click", act);
