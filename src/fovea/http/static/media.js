// Images and videos: which files are accepted, their sizes, and their form in requests.

const SENT = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);
const VIDEOS = new Set(["video/mp4", "video/webm"]);

// The kind of a file: image, video, pdf, or "" for one that cannot be sent.
export function kindOf(file) {
  if (file.type === "application/pdf" || /\.pdf$/i.test(file.name || "")) return "pdf";
  if (VIDEOS.has(file.type)) return "video";
  return file.type.startsWith("image/") ? "image" : "";
}

// Return {blob, width, height} of an image. Types that the server does not read become PNG if the browser reads
// them. Raises Error for a file that is not an image.
export async function readImage(file) {
  const picture = new Image();
  const url = URL.createObjectURL(file);
  try {
    picture.src = url;
    await picture.decode();
    const { naturalWidth: width, naturalHeight: height } = picture;
    return { blob: SENT.has(file.type) ? file : await redraw(picture, width, height), width, height };
  } catch {
    throw new Error(`${file.name || "The image"} cannot be read as an image.`);
  } finally {
    URL.revokeObjectURL(url);
  }
}

async function redraw(picture, width, height) {
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").drawImage(picture, 0, 0, width, height);
  return canvas.convertToBlob({ type: "image/png" });
}

// Return {blob, width, height} of a video. Raises Error if the browser cannot read its header.
export async function readVideo(file) {
  const video = document.createElement("video");
  const url = URL.createObjectURL(file);
  try {
    await new Promise((resolve, reject) => {
      video.onloadedmetadata = resolve;
      video.onerror = () => reject(new Error(`${file.name || "The video"} cannot be read as a video.`));
      video.preload = "metadata";
      video.src = url;
    });
    return { blob: file, width: video.videoWidth, height: video.videoHeight };
  } finally {
    URL.revokeObjectURL(url);
  }
}

export function dataUrlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// Decode a base64 data URL. The page's policy lets no data URL be fetched.
export function bytesOfDataUrl(url) {
  const match = /^data:([\w.+/-]+);base64,/.exec(url);
  if (!match) throw new Error("The text is not a data URL.");
  return { type: match[1], bytes: Uint8Array.from(atob(url.slice(match[0].length)), (char) => char.charCodeAt(0)) };
}

// Object URLs of stored media, each made once and released together.
export class MediaUrls {
  constructor(history) {
    this.history = history;
    this.urls = new Map();
  }

  async url(id) {
    if (!this.urls.has(id)) {
      this.urls.set(id, this.history.media(id).then((item) => (item ? URL.createObjectURL(item.blob) : "")));
    }
    return this.urls.get(id);
  }

  // Forget all URLs. Returns a function that releases them, for the time when nothing shows them any more.
  forget() {
    const urls = [...this.urls.values()];
    this.urls.clear();
    return async () => { for (const url of urls) URL.revokeObjectURL(await url); };
  }
}
