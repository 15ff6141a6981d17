// The server has kept the token of the printed address in a cookie, so copied links need not hold it. This module is
// imported first, because the router reads the address when it is made.
const address = new URL(window.location.href);
if (address.searchParams.has("token")) {
  address.searchParams.delete("token");
  window.history.replaceState(null, "", address);
}
