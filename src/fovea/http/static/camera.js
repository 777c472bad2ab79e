// Taking a picture with the camera, in a dialog.

import { el } from "./dom.js";

export function hasCamera() {
  return Boolean(navigator.mediaDevices?.getUserMedia);
}

// Show the camera in an empty <dialog>. Resolves with a JPEG as a File, or with null if the user closes the dialog.
// Raises Error with words for the user if there is no camera or it may not be used.
export async function takePicture(dialog) {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({
      video: { facingMode: "environment", width: { ideal: 1920 }, height: { ideal: 1080 } },
    });
  } catch (error) {
    throw new Error(error.name === "NotAllowedError" ? "The browser does not let this page use the camera."
      : "No camera can be used.");
  }
  try {
    return await picture(dialog, stream);
  } finally {
    for (const track of stream.getTracks()) track.stop();
    dialog.replaceChildren();
  }
}

function picture(dialog, stream) {
  return new Promise((resolve) => {
    const video = el("video", { autoplay: true, playsinline: true, "aria-label": "Picture of the camera" });
    video.muted = true;
    video.srcObject = stream;
    const take = el("button", { type: "button", class: "primary", text: "Take picture", disabled: true });
    video.addEventListener("playing", () => { take.disabled = false; });
    take.addEventListener("click", async () => {
      const file = await frameOf(video);
      resolve(file);
      dialog.close();
    });
    dialog.replaceChildren(el("h2", { text: "Camera" }), video, el("div", { class: "row end" },
      el("button", { type: "button", text: "Cancel", onclick: () => dialog.close() }), take));
    dialog.addEventListener("close", () => resolve(null), { once: true });
    dialog.showModal();
    video.play().catch(() => {});
  });
}

async function frameOf(video) {
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  canvas.getContext("2d").drawImage(video, 0, 0);
  const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
  return new File([blob], "camera.jpg", { type: "image/jpeg" });
}
