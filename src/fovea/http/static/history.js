// The history in IndexedDB: conversations as records, images and videos as blobs. Nothing of it is sent anywhere.

const DATABASE = "fovea";
const STORES = ["conversations", "media"];

export class History {
  static async open() {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => {
      for (const store of STORES) request.result.createObjectStore(store, { keyPath: "id" });
    };
    return new History(await result(request));
  }

  constructor(database) {
    this.database = database;
    database.onversionchange = () => database.close();
  }

  // All conversations without their messages, the newest first.
  async list() {
    const records = await this.all("conversations");
    return records
      .map(({ id, title, updated }) => ({ id, title, updated }))
      .sort((a, b) => b.updated - a.updated);
  }

  async load(id) {
    return result(this.store("conversations").get(id));
  }

  async save(conversation) {
    await done(this.store("conversations", "readwrite").put(conversation.record));
  }

  // item: {id, kind, name, width, height, blob}.
  async addMedia(item) {
    await done(this.store("media", "readwrite").put(item));
  }

  async media(id) {
    return result(this.store("media").get(id));
  }

  async all(store) {
    return result(this.store(store).getAll());
  }

  // Delete a conversation, and the images and videos that no other one shows.
  async remove(id) {
    const records = await this.all("conversations");
    const used = new Set(records.filter((record) => record.id !== id).flatMap(mediaOf));
    const own = records.filter((record) => record.id === id).flatMap(mediaOf);
    const change = this.database.transaction(STORES, "readwrite");
    change.objectStore("conversations").delete(id);
    for (const name of own) if (!used.has(name)) change.objectStore("media").delete(name);
    await complete(change);
  }

  async clear() {
    const change = this.database.transaction(STORES, "readwrite");
    for (const store of STORES) change.objectStore(store).clear();
    await complete(change);
  }

  // Write records and media together: either all of them are stored, or none.
  async putAll(records, media) {
    const change = this.database.transaction(STORES, "readwrite");
    for (const record of records) change.objectStore("conversations").put(record);
    for (const item of media) change.objectStore("media").put(item);
    await complete(change);
  }

  store(name, mode = "readonly") {
    return this.database.transaction(name, mode).objectStore(name);
  }
}

export function mediaOf(record) {
  return record.nodes.flatMap((node) => (node.media || []).map((item) => item.id));
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function complete(change) {
  return new Promise((resolve, reject) => {
    change.oncomplete = resolve;
    change.onabort = change.onerror = () => reject(change.error);
  });
}

// A write counts once its transaction is complete: the browser may still refuse it for lack of room.
function done(request) {
  return complete(request.transaction);
}
